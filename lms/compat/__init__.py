"""IBM's names for Large Model Support, on a stock TensorFlow.

``install()`` adds the settings and statistics that IBM's builds had to ``tf.config.experimental`` and
``tf.experimental``; ``lms.enable()`` calls it. ``tensorflow_large_model_support`` is the package of the two
earlier generations. Importing this package imports no TensorFlow.
"""

from lms.tf_names.install import install

__all__ = ["install"]
