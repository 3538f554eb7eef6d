"""BitBLAS's cache of operators. Kernels lie in Ladder's own cache; a database here is configurations."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ladder.integrations.bitblas.config import MatmulConfig
from ladder.integrations.bitblas.matmul import Matmul
from ladder.runtime.cache import KernelCache
from tile_types.errors import ArtifactError
from tile_types.files import replacing

DATABASE = "bitblas.json"
"""File of a database: a list of configurations."""

_path: list[Path] = []


def set_database_path(path: str | os.PathLike[str]) -> None:
    """Choose the folder of the database."""
    _path[:] = [Path(path)]


def get_database_path() -> str:
    """Return the folder of the database; by default that of compiled kernels."""
    return str(_path[0] if _path else KernelCache().root)


class OperatorCache:
    """Operators by configuration."""

    def __init__(self) -> None:
        self.cache: dict[MatmulConfig, Matmul] = {}
        self._lock = threading.RLock()

    def add(self, config: MatmulConfig, op_inst: Matmul) -> None:
        """Keep an operator."""
        with self._lock:
            self.cache[config] = op_inst

    def get(self, config: MatmulConfig) -> Matmul | None:
        """Return the operator of a configuration, if there is one."""
        return self.cache.get(config)

    def exists(self, config: MatmulConfig) -> bool:
        """Tell whether there is an operator of a configuration."""
        return config in self.cache

    def clear(self) -> None:
        """Forget all operators."""
        with self._lock:
            self.cache.clear()

    def size(self) -> int:
        """Return the number of operators."""
        return len(self.cache)

    def save_into_database(self, database_path: str | None = None, target: Any = None) -> None:
        """Write the configurations beside those that the folder has."""
        folder = Path(database_path or get_database_path())
        with self._lock, replacing(folder / DATABASE, folder=True) as part:
            known = dict.fromkeys([*_read(folder), *self.cache])
            part.write_text(json.dumps([asdict(config) for config in known]))

    def load_from_database(self, database_path: str, target: Any = None) -> None:
        """Add an operator for each configuration of a folder.

        Raises ArtifactError if its file is damaged.
        """
        with self._lock:
            for config in _read(Path(database_path)):
                self.cache.setdefault(config, Matmul(config, target=target, from_database=True))


def _read(folder: Path) -> list[MatmulConfig]:
    path = folder / DATABASE
    if not path.exists():
        return []
    try:
        return [MatmulConfig(**fields) for fields in json.loads(path.read_text())]
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{path} is no list of configurations: {error}; delete it") from error


global_operator_cache = OperatorCache()


def load_global_ops_cache(database_path: str | None = None, target: Any = None) -> OperatorCache:
    """Load a database into `global_operator_cache`."""
    global_operator_cache.load_from_database(database_path or get_database_path(), target)
    return global_operator_cache
