"""Self-supervised pretraining of an encoder on the tiles of a study.

`sources` and `feed` bring tiles, `recipes` says which views the settings ask for, `views` makes them on the training
device, `objectives` say what is learned from them (with `head` and `loss`, and `joint` across all parts of a batch),
`schedule` which number holds at which step, `optim` moves the weights. `learner` puts these together, `train` runs it,
`checkpoint` keeps what it needs to go on. Import from the files, not from here.
"""
