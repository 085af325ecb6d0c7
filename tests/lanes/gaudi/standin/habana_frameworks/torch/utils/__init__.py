"""What the vendor's tools ask of a device."""
