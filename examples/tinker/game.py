"""A reduced game of twenty questions: four secrets, three questions (one of them useless), and a guess."""

from __future__ import annotations

SECRETS = {"bird": (True, True), "cat": (True, False), "plane": (False, True), "stone": (False, False)}
"""{secret: (is it alive?, does it fly?)}"""
QUESTIONS = {"1": "alive", "2": "flies", "3": "blue"}
GUESSES = dict(zip("abcd", SECRETS, strict=True))
TURNS = 4
RULES = """I think of a bird, a cat, a plane or a stone.
Reply 1: is it alive? 2: does it fly? 3: is it blue? Or guess: a bird, b cat, c plane, d stone."""


class Game:
    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.known = {"alive": "?", "flies": "?"}
        self.turns = 0
        self.reward: float | None = None

    def prompt(self) -> str:
        return f"{RULES}\nalive {self.known['alive']}, flies {self.known['flies']}"

    def take(self, reply: str) -> None:
        """Answer a question; a guess, or too many turns, ends the game."""
        self.turns += 1
        move = reply.strip()[:1]
        if move in GUESSES:
            self.reward = float(GUESSES[move] == self.secret)
        elif self.turns == TURNS:
            self.reward = 0.0
        for place, name in enumerate(self.known):
            if QUESTIONS.get(move) == name:
                self.known[name] = "yes" if SECRETS[self.secret][place] else "no"
