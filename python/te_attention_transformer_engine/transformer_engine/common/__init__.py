"""What TransformerEngine's frameworks share: the recipes of FP8."""
