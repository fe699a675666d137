"""Stands for a process that compiles and never comes to an end."""

import time

time.sleep(600)
