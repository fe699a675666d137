"""What trees and draft chains count for ``/metrics``, in rows."""
