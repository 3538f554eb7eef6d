"""The figures of the four papers that Ladder unites: what they report, and the same by Ladder.

`published` holds what the papers print, with the source of each number; `records` finds results of the other
benchmarks; `figure` is the form of a figure; `ladder_figures` and `other_figures` list the figures and derive
their points; `page` prints and draws them. Nothing is timed here: a figure names the benchmarks that do.
"""
