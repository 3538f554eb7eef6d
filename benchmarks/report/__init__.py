"""Draws results of `benchmarks.peers` as one HTML page without scripts or outside files.

`svg` draws axes and marks, `charts` the four figures, `tables` the tables, `page` puts them
together. The same results always give the same page.
"""
