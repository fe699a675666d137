"""hicache."""
