"""The refusals of trees and draft models, a row each; those of a family of targets are its own."""
