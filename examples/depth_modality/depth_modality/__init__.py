"""An example of a modality of one's own: depth maps for the vision tower."""
