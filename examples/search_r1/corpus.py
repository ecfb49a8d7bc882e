"""Generated documents about people, their towns, and the towns' rivers. Questions need one look-up, or two that build on each other."""

from __future__ import annotations

import random

FIRST = ("Ada", "Boris", "Chloe", "Dimitri", "Elena", "Farid", "Greta", "Hugo", "Irene", "Jonas", "Katja", "Liam")
LAST = ("Arvan", "Belmo", "Cortan", "Drusk", "Elwin", "Fargo", "Gilde", "Harrow", "Ispen", "Jarvik", "Kolber", "Lindt")
TOWNS = ("Aldmoor", "Brisk", "Calder", "Dunwick", "Elsport", "Fenmark")
RIVERS = ("Arn", "Bel", "Cerra", "Dov", "Esk", "Fyne")


def people(seed: int = 0) -> list[tuple[str, str]]:
    source = random.Random(seed)
    names = [f"{first} {last}" for first, last in zip(FIRST, LAST, strict=True)]
    return [(name, source.choice(TOWNS)) for name in names]


def documents(seed: int = 0) -> list[str]:
    born = [f"{name} is a painter who was born in {town} and has lived there ever since." for name, town in people(seed)]
    return born + [f"{town} is a town on the river {river}." for town, river in zip(TOWNS, RIVERS, strict=True)]


def questions(seed: int = 0) -> list[dict[str, str]]:
    river_of = dict(zip(TOWNS, RIVERS, strict=True))
    one = [{"question": f"Where was the painter {name} born?", "expected": town} for name, town in people(seed)]
    two = [{"question": f"On which river is the town where {name} was born?", "expected": river_of[town]} for name, town in people(seed)]
    return [task for pair in zip(one, two, strict=True) for task in pair]
