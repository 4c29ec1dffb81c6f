"""What every benchmark uses: reports, loads, servers, models to measure with, traces."""
