from halimede_operator.main import main

main()
