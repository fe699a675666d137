"""What drafts: the drafters of trees and of chains."""
