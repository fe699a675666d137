"""The drafters of trees and of chains."""
