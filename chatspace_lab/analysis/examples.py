"""Contrasting texts to try things with: sentences about the sea, and the same sentences about an office."""

from __future__ import annotations

SEA = (
    "The waves rolled under the ship as the sailors hauled in the nets.",
    "We sailed across the ocean and watched dolphins leap beside the boat.",
    "Salt spray, seagulls and the smell of the harbour filled the air.",
    "The captain steered the old ship through the storm towards the island.",
    "Whales sang deep beneath the surface of the blue sea.",
    "The tide came in and covered the beach with foam and shells.",
)
OFFICE = (
    "The manager opened the spreadsheet as the staff joined the meeting.",
    "We drove across the city and watched traffic lights change beside the bank.",
    "Coffee, printers and the smell of the office filled the air.",
    "The accountant guided the small company through the audit towards a profit.",
    "Computers hummed deep beneath the floor of the grey building.",
    "The invoice came in and covered the desk with forms and stamps.",
)
