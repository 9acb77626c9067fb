"""The files of a study: where they are, how they are written, what they were built from.

layout       every path of a study
"""
