"""Small in-memory databases, and questions about them with the correct queries."""

from __future__ import annotations

import sqlite3

DATABASES = {
    "concerts": """
CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, country TEXT, age INTEGER);
CREATE TABLE concert (id INTEGER PRIMARY KEY, title TEXT, year INTEGER, singer_id INTEGER REFERENCES singer(id));
INSERT INTO singer VALUES (1, 'Ada', 'France', 52), (2, 'Ben', 'Chile', 32), (3, 'Cleo', 'France', 41), (4, 'Dan', 'Ghana', 29);
INSERT INTO concert VALUES (1, 'Dawn', 2014, 1), (2, 'Dusk', 2015, 1), (3, 'Noon', 2014, 3), (4, 'Night', 2015, 4);
""",
    "flights": """
CREATE TABLE airport (code TEXT PRIMARY KEY, city TEXT);
CREATE TABLE flight (number INTEGER PRIMARY KEY, origin TEXT, target TEXT, minutes INTEGER);
INSERT INTO airport VALUES ('AAA', 'Aachen'), ('BBB', 'Bergen'), ('CCC', 'Cadiz');
INSERT INTO flight VALUES (10, 'AAA', 'BBB', 95), (11, 'BBB', 'AAA', 90), (12, 'AAA', 'CCC', 160), (13, 'CCC', 'BBB', 210);
""",
}

QUESTIONS = (
    ("concerts", "How many singers are there?", "SELECT COUNT(*) FROM singer"),
    ("concerts", "What are the names of the singers from France?", "SELECT name FROM singer WHERE country = 'France'"),
    ("concerts", "How old is the oldest singer?", "SELECT MAX(age) FROM singer"),
    ("concerts", "How many concerts were there in 2014?", "SELECT COUNT(*) FROM concert WHERE year = 2014"),
    (
        "concerts",
        "Which singers have no concert?",
        "SELECT name FROM singer WHERE id NOT IN (SELECT singer_id FROM concert)",
    ),
    (
        "concerts",
        "How many concerts has each singer who has any? Give name and count.",
        "SELECT name, COUNT(*) FROM singer JOIN concert ON singer.id = singer_id GROUP BY name",
    ),
    ("flights", "How many flights are there?", "SELECT COUNT(*) FROM flight"),
    ("flights", "Which flights take more than 100 minutes? Give their numbers.", "SELECT number FROM flight WHERE minutes > 100"),
    ("flights", "How long do flights take on average?", "SELECT AVG(minutes) FROM flight"),
    (
        "flights",
        "Which cities have a flight to Bergen?",
        "SELECT a.city FROM flight JOIN airport a ON a.code = origin JOIN airport b ON b.code = target WHERE b.city = 'Bergen'",
    ),
)


def connect(name: str) -> sqlite3.Connection:
    """Create the database in memory; it is discarded with the connection."""
    connection = sqlite3.connect(":memory:")
    connection.executescript(DATABASES[name])
    return connection


def schema(name: str) -> str:
    """Return the statements that create its tables."""
    return "\n".join(line for line in DATABASES[name].strip().splitlines() if line.startswith("CREATE"))


def rows(name: str, query: str) -> list[tuple[object, ...]]:
    """Run a query; return at most 100 rows. Raises sqlite3.Error."""
    with connect(name) as connection:
        return connection.execute(query).fetchmany(100)
