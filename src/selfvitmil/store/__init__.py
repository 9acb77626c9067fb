"""The files of a study: where they are, how they are written, what they were built from.

layout       every path of a study
lock         who may write into a study: one process, or several shards of a run
files        atomic writes, hashes of files and settings, safe readers
guard        files from outside are opened first in a process that may die
provenance   what an artefact was built from, whether it is up to date, what a stage did with it
failures     failures.csv, and texts without absolute paths
"""
