"""Write the support tables of the READMEs of types and devices from the tables themselves."""

from __future__ import annotations

import re
from pathlib import Path

from ladder.cli import tables

ROOT = Path(__file__).resolve().parents[1]


def with_tables(text: str) -> str:
    """Return a README's text with its tables made anew."""
    for name, table in (("types", tables.type_markdown()), ("devices", tables.device_markdown())):
        marked = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marked.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text)  # type: ignore[misc]
    return text


def main() -> None:
    """Rewrite both in place."""
    for folder in ("tile_types", "targets"):
        readme = ROOT / folder / "README.md"
        readme.write_text(with_tables(readme.read_text()))


if __name__ == "__main__":
    main()
