"""The files of a study: where they are and how they are written.

layout       every path of a study
files        atomic writes, hashes of files and settings
lock         one process at a time
failures     failures.csv
redact       texts without absolute paths
"""
