"""What an encoder learns by: one file per objective, all behind the contract of `contract`.

`dino` learns to predict a teacher's distributions, `simdino` a teacher's directions, `lejepa` the mean of its own
views, `simclr` which views belong together. Import from the files, not from here.
"""
