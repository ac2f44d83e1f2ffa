"""Operations that doors share: linear recurrences, filters, and the shapes that they take."""
