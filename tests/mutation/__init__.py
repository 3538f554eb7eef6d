"""Faults planted in the compiler, one at a time: what the test suite is worth.

``faults/*.toml`` lists them as data: a file, a text that stands in it once, what replaces it, the tests that
should fail, and a sentence. ``python -m tests.mutation`` plants each in a copy of the tree and tests it.
"""
