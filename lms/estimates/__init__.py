"""Forecasts of a traced step on devices, for people and programs."""
