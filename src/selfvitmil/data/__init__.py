"""Tiles as tensors for training and inference: where they come from, reading ahead, augmented views.

`sources` lists the tiles of slides, packs, image folders or memory; `loader` orders and reads them for training;
`views` augments them on the training device; `readers` reads the tiles of one slide in order for embedding. Import from
the modules: `readers` works without torch.
"""

RUN = 16
"""Neighbouring tiles read together by one reader: they share compressed blocks of the slide."""
