"""The version of the project, in its one place: packages, images and documents read it here."""

__version__ = "0.1.0"
