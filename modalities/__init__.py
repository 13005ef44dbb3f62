"""Modalities: encoded media to Arrow columns and back. Not models: no torch is imported here.

One file a modality (`image`, `audio`, `video`; `text` and `routing` are plain functions). `base` says what a
modality is, `registry` finds the built-in ones and yours, `conformance` checks yours.
"""
