"""The tool of all these agents."""


def population(city: str) -> str:
    """How many people live in a city.

    Args:
        city: the name of the city
    """
    return f"{city} has {sum(map(ord, city)) * 10} people"
