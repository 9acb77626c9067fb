"""The fault campaign: a miniature study is disturbed in every way that machines and people know, and must recover.

miniature   the study, its stages, and the comparison with an undisturbed run
children    commands in forks of a process that has loaded everything
shim        open, write, fsync, rename, mmap and read that fail when told to, and a disk that loses what was not synced
campaign    the parts of the campaign; `make faults` runs them all
"""
