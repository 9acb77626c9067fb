"""Files and requests from outside, damaged or made up: the answer is a result or an error of ours.

mutations   how bytes are damaged; by Hypothesis, and by a seed alone
targets     what is parsed, from which sound examples
isolation   calls in forks with limits of time and memory, which survive hangs and crashes of native code
campaign    `python -m fuzz.campaign`: many inputs per parser, with counts
"""
