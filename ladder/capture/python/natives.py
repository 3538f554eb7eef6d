"""The annotation table of native functions: what capture may assume about each.

A *replayable* native is a deterministic function of its arguments that calls nothing of the
user's; matched runs call it again only where its result lives on. ``DATA`` natives look into their
arguments, so they need plain data; ``STRUCTURE`` natives only move references. ``CHANGES`` says
which change their first argument. A native in no table breaks the graph.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import builtins
import collections
import copy
import hashlib
import heapq
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import logging
import math
import operator
import os.path
import random
import re
import string
import struct
import textwrap
import types
import typing
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch

from ladder.capture.python import polyfills
from ladder.capture.python.words import words


def _members(home: Any, names: str) -> set[Any]:
    return {getattr(home, name) for name in names.split() if hasattr(home, name)}


STRUCTURE: frozenset[Any] = frozenset(
    _members(builtins, "list tuple dict enumerate zip reversed slice iter next range")
    | _members(itertools, "chain islice repeat product combinations permutations zip_longest cycle count")
    | {deque, OrderedDict, collections._tuplegetter}  # type: ignore[attr-defined]
    | _members(operator, "is_ is_not length_hint itemgetter attrgetter")
    | {weakref.ref, dict.fromkeys, types.MappingProxyType}
)
"""Natives that move references and look no further than the containers they are given."""

DATA: frozenset[Any] = frozenset(
    _members(builtins, "abs sum min max sorted divmod round pow ord chr hex bin oct repr str int float bool")
    | _members(builtins, "complex format hash bytes set frozenset any all ascii")
    | {value for value in vars(math).values() if type(value) is types.BuiltinFunctionType}
    | {value for value in vars(operator).values() if type(value) is types.BuiltinFunctionType}
    | _members(bisect, "bisect_left bisect_right bisect insort insort_left insort_right")
    | _members(heapq, "heappush heappop heapify heappushpop heapreplace nlargest nsmallest")
    | _members(struct, "pack unpack calcsize unpack_from")
    | {value for value in vars(binascii).values() if type(value) is types.BuiltinFunctionType}
    | _members(base64, "b64encode b64decode b32encode b16encode urlsafe_b64encode urlsafe_b64decode")
    | _members(hashlib, "md5 sha1 sha256 sha512 sha224 sha384 blake2b blake2s")
    | _members(copy, "copy deepcopy")
    | _members(json, "dumps loads")
    | _members(re, "match search sub split findall fullmatch compile escape")
    | _members(textwrap, "dedent indent wrap fill shorten")
    | _members(os.path, "join split splitext basename dirname normpath isabs commonprefix")
    | _members(string, "capwords")
    | _members(itertools, "accumulate")
    | _members(collections, "_count_elements")
    | {polyfills.order, torch.finfo, torch.iinfo, torch.device, torch.Size}
    | {polyfills.capability_of, polyfills.start_gpus, torch.cuda.get_device_capability}
    | {int.from_bytes, float.fromhex, bytes.fromhex, str.maketrans}
    | _members(np, "arange array asarray zeros ones empty float32 float64 int64 int32 float16 bool_ uint8")
    | _members(np, "hanning hamming blackman full eye linspace logspace tri identity dtype")
)
"""Natives and Python functions that compute plain data from plain data."""

_WITH_FILES_OR_STATE = words("save savez savez_compressed savetxt array2string array_repr array_str")
OF_ARRAYS: frozenset[Any] = frozenset(
    {value for value in vars(np).values() if type(value) in (np.ufunc, type(np.prod))}
    | _members(np, "array asarray float32 float64 int64 int32 float16 bool_ uint8")
    | _members(builtins, "int float complex bool abs sum min max any all list tuple sorted divmod round pow")
    | {value for value in vars(operator).values() if type(value) is types.BuiltinFunctionType}
) - _members(np, " ".join(_WITH_FILES_OR_STATE))
"""Natives that compute from arrays, and say nothing that depends on how arrays are printed."""

ABOUT_PROGRAMS: frozenset[Any] = frozenset(
    _members(inspect, "signature getfullargspec isclass isfunction ismethod isgeneratorfunction unwrap")
    | _members(typing, "get_type_hints get_origin get_args")
    | _members(importlib.util, "find_spec")
    | _members(importlib.metadata, "version")
)
"""Functions that say what a function, class or package is: the same as long as it is unchanged."""

CHANGES: frozenset[Any] = frozenset(
    _members(bisect, "insort insort_left insort_right")
    | _members(heapq, "heappush heappop heapify heappushpop heapreplace")
    | {next}
    | _members(collections, "_count_elements")
)
"""Those of the above that change their first argument."""

OF_TENSORS: dict[Any, Any] = {abs: torch.abs, round: torch.round, pow: torch.pow} | {
    value: value for value in vars(operator).values() if type(value) is types.BuiltinFunctionType
}
"""Natives that are operators where they are given tensors."""

KEYS_ONLY: frozenset[Any] = frozenset({sorted, min, max, set, frozenset, any, all, sum})
"""Natives that see nothing of a dictionary but its keys."""

_LIST = "append extend insert pop remove clear reverse sort index count copy __len__ __iter__ __reversed__"
_DICT = "get items keys values pop popitem setdefault update clear copy __len__ __iter__ __reversed__"
_SET = (
    "add discard remove pop clear update copy union intersection difference symmetric_difference issubset"
    " issuperset isdisjoint intersection_update difference_update symmetric_difference_update __len__"
    " __iter__"
)
_DEQUE = "append appendleft extend extendleft pop popleft rotate reverse clear copy insert remove count index"
_BASIC = " __getitem__ __setitem__ __delitem__ __contains__ __init__ __eq__ __ne__"

METHODS: dict[type, frozenset[str]] = {
    list: frozenset(words(_LIST + _BASIC)),
    dict: frozenset(words(_DICT + _BASIC)),
    OrderedDict: frozenset(words(_DICT + _BASIC + " move_to_end")),
    defaultdict: frozenset(words(_DICT + _BASIC)),
    set: frozenset(words(_SET + _BASIC)),
    frozenset: frozenset(words(_SET + _BASIC)),
    deque: frozenset(words(_DEQUE + _BASIC)),
    tuple: frozenset(words("index count __len__ __iter__ __getitem__ __contains__ __eq__ __ne__ __add__")),
}
"""Methods of containers that capture knows."""

UNHEEDING = frozenset(
    words("keys values items get __iter__ __reversed__ __len__ __contains__")
    + words("__getitem__ __setitem__ __delitem__")
)
"""Methods of an ordered dictionary that call no method which a subclass might override."""

READERS = frozenset(
    words(
        "index count copy get items keys values __len__ __iter__ __reversed__ __getitem__ __contains__ union"
        " intersection difference symmetric_difference issubset issuperset isdisjoint __eq__ __ne__ __add__"
    )
)
"""Methods of containers that change nothing."""

BLIND = frozenset(words("append appendleft"))
"""Methods that change a list or deque whatever is in it."""

WHOLE_OR_NOT = frozenset(words("pop popitem popleft remove move_to_end __delitem__"))
"""Methods that raise before they have changed anything."""

INDEXED = frozenset(words("__getitem__ __setitem__ __delitem__ insert pop rotate __mul__ __rmul__ __imul__"))
"""Methods of sequences whose first argument is a number: they ask other objects for one."""

CONSUMING = frozenset(
    words(
        "extend extendleft update __init__ union intersection difference symmetric_difference issubset"
        " issuperset isdisjoint intersection_update difference_update symmetric_difference_update"
    )
)
"""Methods of containers that take all that an iterator has."""

FILLS: dict[type, Any] = {
    list: list.extend,
    deque: deque.extend,
    set: set.update,
    dict: dict.update,
    OrderedDict: OrderedDict.update,
}
"""Type of a container -> its method that puts in all that an iterator has."""

STEPWISE = frozenset({*FILLS.values(), deque.extendleft, set.difference_update})
"""Methods that change their owner before they take the next item."""

CONSUMERS: frozenset[Any] = frozenset(
    {list, tuple, dict, set, frozenset, deque, OrderedDict, sorted, sum, min, max, any, all, bytes}
    | {heapq.nlargest, heapq.nsmallest, collections._count_elements}  # type: ignore[attr-defined]
)
"""Natives that take all that an iterator has."""

NAMED_ITEMS: frozenset[Any] = frozenset({dict, OrderedDict})
"""Natives whose named arguments are items of what they make."""

ASKING: frozenset[Any] = frozenset({list, tuple, sorted, bytes})
"""Those that first ask how many items there will be."""

LOOKING = frozenset(
    words(
        "remove sort index count __contains__ __eq__ __ne__ add discard update union intersection difference"
        " symmetric_difference issubset issuperset isdisjoint intersection_update difference_update"
        " symmetric_difference_update"
    )
)
"""Methods that hash or compare elements: for lists and deques these must be plain data."""

STORING = frozenset(words("append appendleft insert __setitem__ setdefault get pop"))
"""Methods that keep or give back an item as it is, whatever is in it."""

SCALAR_TYPES: tuple[type, ...] = (
    *(int, float, complex, str, bytes, bool, range, slice, type(None), np.generic),
    *(torch.Size, torch.device, np.dtype, re.Pattern),
)
"""Types whose methods are all deterministic and without effect."""


def _iterator_type(value: Any) -> type:
    return type(iter(value))


ITERATORS: frozenset[type] = frozenset(
    {
        *map(_iterator_type, ((), [], {}, set(), "", b"", range(0), deque())),
        *(type(iter({}.items())), type(iter({}.values())), type(reversed([])), type(reversed({}))),
        *(type(iter("\u1234")), type(iter(range(1 << 70))), type(iter(OrderedDict()))),
        *(zip, enumerate, reversed, itertools.chain, itertools.islice, itertools.repeat, itertools.product),
        *(itertools.combinations, itertools.permutations, itertools.zip_longest, itertools.cycle),
        *(itertools.count, itertools.accumulate, map, filter),
    }
)
"""Iterators that run no code of their own; what they iterate over is known when they are made."""

REDUCIBLE: frozenset[type] = frozenset(
    {*map(_iterator_type, ((), [], range(0), {}, set())), enumerate, zip, type(reversed([]))}
    | {type(iter({}.items())), type(iter({}.values()))}
)
"""Iterators whose ``__reduce__`` says what is left without taking it."""

VIEWS: frozenset[type] = frozenset({type({}.items()), type({}.keys()), type({}.values())}) | {
    type(OrderedDict().items()),
    type(OrderedDict().keys()),
    type(OrderedDict().values()),
    types.MappingProxyType,
}

FIXED: dict[type, frozenset[str]] = {
    np.ndarray: frozenset(
        words("astype sum mean copy reshape min max tolist item prod cumsum transpose all any argmax argmin")
        + words("argsort clip cumprod diagonal dot flatten nonzero ravel repeat round squeeze std take trace")
        + words("var view searchsorted swapaxes conj __len__ __getitem__ __contains__")
        + words("shape ndim size dtype T nbytes itemsize real imag")
    ),
    re.Match: frozenset(
        words("group groups groupdict start end span expand __getitem__ string re pos endpos lastindex")
        + words("lastgroup regs")
    ),
}
"""Types of what natives make of plain data, which no step changes -> what is read of them."""

SAYING: frozenset[Any] = frozenset({print, warnings.warn, logging.Logger._log})
"""Functions that tell people something, and change nothing that the program reads."""

LEAVES: frozenset[Any] = frozenset({torch.manual_seed, torch.random.manual_seed, torch.seed, random.seed})
"""Python functions that are one native call, because what is inside does not matter."""

FRAME_NAMES = frozenset(
    words(
        "_getframe currentframe f_locals f_back f_globals settrace setprofile _current_frames getouterframes"
        " _getframemodulename gi_yieldfrom gi_frame cr_await cr_frame ag_await ag_frame tb_frame"
    )
)
"""Names whose use means that a function looks at frames; `prescan` reports them."""

FRAME_FUNCTIONS = frozenset(words("locals eval exec"))
"""Built-in functions that do; attributes of these names are something else."""

FRAME_FUNCTIONS_ALONE = frozenset(words("dir vars"))
"""Built-in functions that do where they are called without arguments."""
