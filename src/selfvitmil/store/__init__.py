"""The files of a study: where they are, how they are written, what they were built from.

layout       every path of a study
files        atomic writes, hashes of files and settings
lock         one process at a time
failures     failures.csv
redact       texts without absolute paths
"""
