"""What every other package uses: errors, seeding, parameters, files, options."""
