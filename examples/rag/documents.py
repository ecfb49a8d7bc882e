"""The handbook of a fictitious company, and questions about it."""

from __future__ import annotations

DOCUMENTS = (
    "Holidays: every employee has 31 days off a year. Days that are left in March are lost.",
    "Travel: trains are booked in second class; flights need the consent of the head of travel, Mara Voss.",
    "Laptops are replaced every 4 years. Broken ones are brought to the help desk in room 112.",
    "The canteen opens at 11:30 and closes at 14:00. On Fridays there is fish.",
    "Expenses are paid back within 10 days if the receipt is sent to the accounts department.",
    "The head of accounts is Jon Ebbe. He sits in room 207.",
)
QUESTIONS = (
    ("How many days off does an employee have a year?", "31"),
    ("In which room is the help desk?", "112"),
    ("When does the canteen open?", "11:30"),
    ("After how many years is a laptop replaced?", "4"),
    ("Who must consent to a flight?", "Mara Voss"),
    ("In which room does the head of the department that pays expenses back sit?", "207"),
)


def train() -> list[dict[str, str]]:
    return [{"question": question, "expected": expected} for question, expected in QUESTIONS[:4]]


def val() -> list[dict[str, str]]:
    return [{"question": question, "expected": expected} for question, expected in QUESTIONS[4:]]
