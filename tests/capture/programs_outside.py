"""Programs that use the standard library, numpy, files, output and generators of random numbers."""

from __future__ import annotations

import bisect
import copy
import heapq
import io
import logging
import os
import random

import numpy as np
import torch
import torch.nn.functional as F
from capture_world import World, calls, normal, program


@program
def heapq_bisect_beam():
    """python-side beam search bookkeeping"""

    def fn(x, scores):
        h = []
        for i, s in enumerate(scores):
            heapq.heappush(h, (-s, i))
            if len(h) > 2:
                heapq.heappop(h)
        idx = sorted(i for _, i in h)
        pos = bisect.bisect_left([1, 3, 5], len(scores))
        bisect.insort(scores, 0.5)
        return x[idx] * pos, heapq.nlargest(2, scores)

    return calls(fn, lambda: (normal(4), [0.3, 0.9, 0.1, 0.7]), lambda: (normal(4), [0.3, 0.2]))


@program
def copy_deepcopy():
    def fn(x, cfg):
        c = copy.deepcopy(cfg)
        c["w"].append(3)
        d = copy.copy(cfg)
        d["n"] = 1
        return x * sum(c["w"]), c, "n" in cfg

    return calls(fn, lambda: (normal(3), {"w": [1, 2]}), lambda: (normal(3), {"w": [5]}))


@program
def os_environ_and_path():
    """feature flag from the environment, changed between calls"""

    def fn(x):
        flag = os.environ.get("ZOO_FLAG", "0") == "1"
        p = os.path.join("a", "b.txt")
        return (x * 2 if flag else x - 1), os.path.splitext(p)[1]

    return World(
        fn,
        [
            (lambda: os.environ.pop("ZOO_FLAG", None), lambda: (normal(3),)),
            (lambda: os.environ.__setitem__("ZOO_FLAG", "1"), lambda: (normal(3),)),
        ],
    )


@program
def struct_hash_base64():
    import base64
    import hashlib
    import struct

    def fn(x, s):
        h = hashlib.md5(s.encode()).digest()
        seed = struct.unpack("<I", h[:4])[0] % 7
        return x * seed, base64.b64encode(h).decode()

    return calls(fn, lambda: (normal(3), "abc"), lambda: (normal(3), "xyz"))


@program
def print_tensor_value():
    def fn(x):
        y = x * 2
        print(f"mean={y.mean().item():.3f}")
        return y + 1

    return calls(fn, lambda: (normal(3),), lambda: (normal(3, seed=1),))


@program
def logging_calls():
    logger = logging.getLogger("zoo.log")
    logger.handlers[:] = []
    buf = io.StringIO()
    h = logging.StreamHandler(buf)
    h.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(h)
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def fn(x):
        logger.info("forward %s", list(x.shape))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("x=%s", x)
        return x.relu()

    return calls(fn, lambda: (normal(3),), lambda: (normal(3),), observe=buf.getvalue)


@program
def python_random_layerdrop():
    """stochastic depth with python random: value must not be baked into the graph"""

    def fn(x):
        k = random.random()
        j = random.randint(1, 1000000)
        return x * k + j

    return World(
        fn,
        [
            (lambda: random.seed(1), lambda: (normal(3),)),
            (None, lambda: (normal(3),)),
            (None, lambda: (normal(3),)),
        ],
    )


@program
def torch_rng_and_dropout():
    def fn(x):
        return F.dropout(x, 0.5, training=True) + torch.rand_like(x)

    return World(fn, [(lambda: torch.manual_seed(0), lambda: (normal(64),)), (None, lambda: (normal(64),))])


@program
def numpy_random_noise():
    def fn(x):
        n = np.random.normal(size=tuple(x.shape)).astype(np.float32)
        return x + torch.from_numpy(n)

    return World(
        fn,
        [
            (lambda: np.random.seed(0), lambda: (normal(3),)),
            (None, lambda: (normal(3),)),
            (None, lambda: (normal(3),)),
        ],
    )


@program
def file_write_inside_forward():
    import tempfile

    p = tempfile.mktemp()

    def fn(x):
        with open(p, "a") as f:
            f.write(f"{tuple(x.shape)}\n")
        return x * 2

    return calls(
        fn,
        lambda: (normal(3),),
        lambda: (normal(4),),
        observe=lambda: open(p).read() if os.path.exists(p) else None,
    )


@program
def numpy_constants_and_shape():
    def fn(x):
        n = int(np.prod(x.shape))
        s = np.sqrt(x.shape[-1])
        w = torch.from_numpy(np.hanning(x.shape[-1]).astype(np.float32))
        return x * w / s, n, np.arange(3), np.float32(2.5)

    return calls(fn, lambda: (normal(2, 4),), lambda: (normal(2, 4, seed=1),))


@program
def numpy_arg_mutated():
    def fn(x, a):
        a[0] += 1
        return x + float(a.sum())

    return calls(fn, lambda: (normal(3), np.ones(3)), lambda: (normal(3), np.arange(3.0)))
