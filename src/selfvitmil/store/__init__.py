"""The files of a study: where they are, how they are written, what they were built from.

layout       every path of a study, and its lock: one process at a time writes
files        atomic writes, hashes of files and settings
provenance   what an artefact was built from, whether it is up to date, what a stage did with it
failures     failures.csv, and texts without absolute paths
"""
