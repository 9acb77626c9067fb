"""The web viewer: slides with their heatmaps in a browser, served on this machine or written as a folder to be mailed.

tiles.py     pictures: DeepZoom geometry, open slides, JPEG
study.py     a study under opaque ids, as plain data
export.py    the viewer's own files, and a folder that needs no server
guard.py     who may ask, and the headers of every answer
server.py    addresses and answers, socket and token, the running server
static/      page, modules and styles of the browser's half
"""
