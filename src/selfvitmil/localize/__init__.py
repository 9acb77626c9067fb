"""Where the evidence lies: scores of tiles to maps, maps to lesions, pictures, files for other tools, and figures.

source.py    which of an aggregator's per-tile evidence a heatmap shows, and why
scores.py    what an aggregator says of every tile, put on one scale
maps.py      the map of a slide, and its file
lesions.py   connected regions of high score, and points
overlay.py   pictures for people
pyramid.py   the map as a pyramidal TIFF for any viewer
export.py    GeoJSON for QuPath, XML for ASAP
lesion_metrics.py  heatmaps against annotations: FROC, coverage, false-positive area ...
"""
