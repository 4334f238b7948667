from lightning_5d.cli import main

raise SystemExit(main())
