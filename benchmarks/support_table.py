"""Write the README's support tables from the tables of types and devices."""

from __future__ import annotations

import re
from pathlib import Path

from ladder.cli import tables

README = Path(__file__).resolve().parents[1] / "README.md"


def with_tables(text: str) -> str:
    """Return the README's text with both tables made anew."""
    for name, table in (("types", tables.type_markdown()), ("devices", tables.device_markdown())):
        marked = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marked.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text)  # type: ignore[misc]
    return text


def main() -> None:
    """Rewrite the README in place."""
    README.write_text(with_tables(README.read_text()))


if __name__ == "__main__":
    main()
