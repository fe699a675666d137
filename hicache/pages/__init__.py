"""What a page is: its key, its size, its layout, and what gives it its meaning."""
