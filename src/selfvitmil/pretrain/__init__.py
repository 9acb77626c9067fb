"""Self-supervised pretraining of an encoder on the tiles of a study.

`train` runs the loop and writes the encoder, `step` does one optimizer step, `learner` holds student and teacher,
`objectives` the methods (DINO, SimDINO, LeJEPA, SimCLR) with their heads, `loss` their losses, `schedule` the
hyperparameters of a run, `optim` parameter groups, the averaged teacher and LoRA, `joint_batch` what makes a batch the
same over processes and parts, `quality` the label-free measure that chooses the weights, `probe` accuracies on labelled
tiles. Tiles and augmented views come from `selfvitmil.data`. Import from the modules, not from here.
"""
