"""Self-supervised pretraining of an encoder on the tiles of a study.

`train` runs the loop and writes the encoder, `step` does one optimizer step, `learner` holds student and teacher,
with their batch norms, `objectives` the methods (DINO, SimDINO, LeJEPA, SimCLR) with their heads and what makes a
batch the same over processes and parts, `loss` the losses of DINO, `optim` the hyperparameters of a run, parameter
groups, the averaged teacher and LoRA, `quality` the label-free measure that chooses the weights, `probe` accuracies on
labelled tiles. Tiles and augmented views come from `selfvitmil.data`. Import from the modules, not from here.
"""
