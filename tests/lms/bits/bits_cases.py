"""All cases by name, those of ``keras.applications`` among them."""

import functools
from typing import Any

import case_models
import case_places
import case_steps
import tensorflow as tf
from case_tools import BATCH, CLASSES, Case, Variables, fit, labels_of, numbers, start_anew, which_keras

SIDES = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}
"""The smallest images that these take; the others take 32 pixels a side, or less."""
LEAST_SIDE = 32
APPLICATIONS = "applications/"


def applications() -> list[str]:
    """The models of ``keras.applications`` of this Keras."""
    made = vars(tf.keras.applications)
    return sorted(name for name, value in made.items() if name[0].isupper() and callable(value))


def train_application(name: str, steps: int) -> Variables:
    """Fit one of them, with weights of its own."""
    start_anew()
    side = SIDES.get(name, LEAST_SIDE)
    options: dict[str, Any] = {"weights": None, "classes": CLASSES, "classifier_activation": None}
    model = getattr(tf.keras.applications, name)(input_shape=(side, side, 3), **options)
    count = steps * BATCH
    return fit(model, case_models.momentum(), numbers(count, side, side, 3), labels_of(count))


def all_cases() -> dict[str, Case]:
    """The cases that this Keras has, by name."""
    made = {**case_models.CASES, **case_steps.CASES, **case_places.CASES}
    made |= {
        APPLICATIONS + name: Case(functools.partial(train_application, name), steps=3)
        for name in applications()
    }
    return {name: case for name, case in made.items() if which_keras() in case.keras}
