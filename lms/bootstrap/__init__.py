"""The folder of ``sitecustomize.py``, which a rank's Python runs at its start; nothing else may live here."""
