"""Where the evidence lies: from tile scores to heatmaps, lesions, pictures, files for other tools, and metrics.

heatmap.py         the heatmap of a slide, its file, and the positions of its tiles
scores.py          which of an aggregator's per-tile evidence a heatmap shows, and its scale
detection.py       lesions (connected regions of high score) and points
overlay.py         pictures
export.py          all files from one heatmap: overlays, GeoJSON for QuPath, XML for ASAP, pyramidal TIFF
lesion_metrics.py  heatmaps against annotations: FROC, coverage, false-positive area ...
lesion_results.py  their scores with confidence intervals, tables and FROC figure
"""
