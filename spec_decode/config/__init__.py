"""The sections of the configuration that trees and draft models have."""
