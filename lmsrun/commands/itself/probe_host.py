"""``lmsrun probe-host``: what lmsrun starts on other hosts to learn what they are like."""

from launch.preflight.answer import main

__all__ = ["main"]
