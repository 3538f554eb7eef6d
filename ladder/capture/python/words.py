"""Tables of names are written as running text."""


def words(text: str) -> tuple[str, ...]:
    """Return the words of `text`."""
    return tuple(text.split())
