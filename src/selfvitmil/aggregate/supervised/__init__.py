"""Fully supervised baseline: a tile classifier trained on annotated tumour regions, pooled to slide scores.

It is the upper reference for weak supervision by slide labels. Two forms: `probe`, a logistic regression on frozen
embeddings, and `tile_network`, a ResNet-18 on tile pixels. In both, `base`
labels tiles as tumour, normal or excluded; every choice (L2 penalty, epoch) is made on tiles of validation slides;
`pooling` combines the tile probabilities of a slide. For the published row (DSMIL's table, accuracy 0.9147 and AUC
0.9362 on Camelyon16) neither the overlap threshold of tumour tiles nor the pooling is known, so both are settings
(`SupervisedSettings`).

    trained = probe.train_probe(training, validation, bags, settings, seed)
    scores = score(trained.module, test_bags)      # selfvitmil.aggregate.train

    trained = tile_network.train_tile_network(training, validation, folder, settings, seed, stain_method="slide")
    scores = tile_network.score_slides(trained.network, test_slides, settings, stain_method="slide")
"""
