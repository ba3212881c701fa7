"""Other libraries' own classes, with the losses of this package inside. Each module needs its library installed."""
