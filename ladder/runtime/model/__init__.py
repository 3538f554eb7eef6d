"""Models as plans: parts bound to what executes them, memory laid out once, one call.

`plan` decides executors and memory from parts alone; `executors` is the table of what runs each kind of
part; `frame` is the memory of one set of sizes; `executable` is the call. `artifact` writes and reads whole
models.
"""
